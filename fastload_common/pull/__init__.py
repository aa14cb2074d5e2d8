"""From any source to a directory: downloads, unpacking and checks at once, in bounded memory."""
