"""Many requests at once into staging memory, with retries and a deadline."""
