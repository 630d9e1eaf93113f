"""What is shown and saved: measurements, predictions, lists of configurations, tables and charts.

- ``measurements``: of what ran; ``plot`` draws them.
- ``simulate``, ``dry_run``: of what would run: predictions, and lists of configurations.
- ``tables``: how all of them look on a terminal.
"""
