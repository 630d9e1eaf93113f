"""Arguments of users, and error messages for invalid arguments."""
