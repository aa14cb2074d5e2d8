"""SGLang adapter of fastload. Not built yet: see the issue *SGLang*."""
