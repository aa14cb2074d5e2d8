"""Host memory that chunks land in, within one budget."""
