"""Which settings fit a model, an image and a machine, why, and how long a start should take.

Pure: takes sizes and a machine's numbers, returns records and text. Reads nothing but its own table
of machines; who wants sizes from a bucket or a registry passes them in.
"""
