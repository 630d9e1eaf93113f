"""Arrays that are split over device meshes, and the halos that devices exchange."""
