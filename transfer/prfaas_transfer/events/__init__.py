"""Cache events of an engine, as its mover keeps them and tells them to gateways and other routers."""
