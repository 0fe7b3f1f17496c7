"""Pages for people: static files of the package, served as they are. Knows files and HTTP, and nothing of models."""
