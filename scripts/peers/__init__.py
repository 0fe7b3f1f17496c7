"""The servers that aserve is compared with: how each is started, and what it does differently."""
