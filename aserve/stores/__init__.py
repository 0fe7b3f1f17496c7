"""What outlives a request, and in a file the process. Each store has one thread that reads and writes."""
