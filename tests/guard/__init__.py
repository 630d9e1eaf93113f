"""Compare the package with records of an earlier commit.

Four modules each make one kind of record: ``signatures``, ``lowered``, ``exported`` and ``results``. The command
``record`` writes the records. ``records/later.json`` lists the entries that were recorded at a later commit, and the
reason for each.
"""
