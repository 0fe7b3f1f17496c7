"""The text that the demo model is trained on, composed from tables and templates by a seeded random generator."""
