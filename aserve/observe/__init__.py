"""What happens in steps and to requests, as values for whoever looks on. Knows no drawing and no HTTP."""
