mod bounds;
mod crashes;
mod disk;
mod flow;
mod objects;
mod rig;
