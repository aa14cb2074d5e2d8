"""Where bundles are kept: a directory of the node, a prefix in S3, or both in turn."""
