"""What an answer may say: structures compiled by llguidance, and their masks token by token."""
