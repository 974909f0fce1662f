"""What a server keeps in its data folder: journal, snapshots and trace; their recovery and their replay."""
