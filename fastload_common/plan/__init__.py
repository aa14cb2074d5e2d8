"""From what is needed to the requests that bring it; pure."""
