"""Arrays sharded over device meshes, and the halos that devices exchange."""
