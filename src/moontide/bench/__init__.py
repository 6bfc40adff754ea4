"""The paper's experiments as a benchmark that can stop and go on at any moment: suites, data, runs, records."""
