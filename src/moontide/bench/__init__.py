"""The paper's experiments as a benchmark that can be interrupted and resumed: suites, data, runs, records."""
