"""A page on which people label the documents of a corpus that teach a readout most."""
