"""Jobs that ship with assay: specs to run and a corpus to run them on."""
