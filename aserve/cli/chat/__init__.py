"""`aserve chat`: a conversation in the terminal."""
