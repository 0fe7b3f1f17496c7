"""`aserve doctor`, and `aserve serve --dry-run`: how a model would run here, told without loading it."""
