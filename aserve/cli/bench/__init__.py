"""`aserve bench`: load on a server, or on a model in this process, and where the time of a step goes."""
