"""Host memory that chunks land in, within one budget, and how they get from there to devices."""
