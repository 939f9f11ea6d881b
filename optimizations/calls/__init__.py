"""Call graphs from Dynamo's generated code without intermediate wrappers."""
