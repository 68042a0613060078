"""torch's own names and signatures, one module here for one module there."""
