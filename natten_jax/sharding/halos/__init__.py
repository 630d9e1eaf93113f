"""The keys and values that devices exchange where tokens are split."""
