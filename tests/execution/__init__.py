"""How the operators are traced, differentiated, batched, lowered and exported."""
