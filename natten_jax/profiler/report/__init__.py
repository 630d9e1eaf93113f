"""What is shown and saved: measurements, predictions, lists of configurations, tables and charts."""
