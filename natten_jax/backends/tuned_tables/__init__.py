"""Tables of tuned configurations that come with the package: a file per kind of device, found by what it says of it.

``bench/tune_models.py`` writes them.
"""
