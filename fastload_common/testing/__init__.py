"""The S3 server, models and faults that tests need; shipped, never imported by what runs."""
