"""The values that exist only while tracing. May import bytecode, guards, torch_facts and hook."""
