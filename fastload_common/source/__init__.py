"""Where objects are: one small interface, one module for each kind of store."""
