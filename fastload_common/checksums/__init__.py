"""CRCs of objects, composed from the CRCs of their parts. Knows no store and no engine."""
