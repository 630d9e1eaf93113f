"""Compare the package with records of an earlier commit, before and after a redesign.

Each of four modules makes one kind of record: ``signatures``, ``lowered``, ``exported`` and ``results``. ``record``
writes them, and ``records/later.json`` lists the entries that were recorded again, with a reason for each.
"""
