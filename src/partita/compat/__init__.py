"""Drop-in replacements under torch's own names and signatures, one module for each of torch's."""
