"""What tests, benchmarks and examples need of the machine; no part of the product."""
