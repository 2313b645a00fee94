"""Data at rest: folders of images become shards (`vitpt shard`)."""
