"""Many requests as the lines of a file: /v1/files, /v1/batches, and what `aserve batch` shares with them."""
