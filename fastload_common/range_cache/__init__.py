"""What loads fetched, kept on a disk of the node by object, state and range, for the next load."""
