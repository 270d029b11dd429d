"""Where Ray and torch meet: the job, the graph and the run."""
