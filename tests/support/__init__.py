"""What tests share: runs, stores, configs, and servers that stand for others."""
