"""Linear attention (arXiv 2006.16236), with a decay if asked for."""
