"""Everything about device meshes: types of arrays on one, and how a call is split over one."""
