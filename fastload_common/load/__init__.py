"""Joins the parts into one load; the facade that adapters see."""
