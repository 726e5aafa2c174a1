"""Container images: imported by version, built with a fabric's libraries, and verified on the nodes that start them."""
