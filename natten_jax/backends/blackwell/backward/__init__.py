"""The backward pass: one kernel owns tiles of queries and goes over keys, the other owns keys and goes over queries.

- ``items``: what a work item owns, and what it goes over.
- ``memory``: what the warps of a block share.
- ``loads``, ``products``, ``weights``: what the warps do that copy tiles, issue products, and own rows of logits.
- ``kernels``: the two kernels that these make, and the gradients.
"""
