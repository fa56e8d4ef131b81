mod bounds;
mod crashes;
mod disk;
mod flow;
mod rig;
