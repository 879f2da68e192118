"""The front: a small server beside an engine that is driven in its own process, and its client.

`server.serve_front` runs in the engine's process, `client.FrontEndpoint` in the controller's,
`process.start_front_process` starts the former from the latter. Messages are those of
`weightlane.messages`; nothing is pickled.
"""
