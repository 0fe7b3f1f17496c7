"""Between texts and tokens: tokenizing, chat templates, and streams of tokens back to text, up to a stop string."""
