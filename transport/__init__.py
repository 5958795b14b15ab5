"""How the processes talk: wire structs, codec, links, mailboxes, the run directory and the embeddable client."""
