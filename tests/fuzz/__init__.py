"""Whatever comes in over gRPC or HTTP, the services answer it or refuse it in their own words, and go on."""
